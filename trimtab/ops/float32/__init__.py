"""float32 on a CPU where PyTorch is slow: products, attention, cross entropy."""
