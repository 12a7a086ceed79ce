"""KV tiers below the device: keys, buffers and budgets; never requests or models."""
