"""The inference engine: what to compute next, computing it, and which KV may be kept.

Importing this package imports nothing heavy; the public names live in `engine.async_engine`.
"""
