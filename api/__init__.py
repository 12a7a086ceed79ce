"""The HTTP surface and the command line."""
