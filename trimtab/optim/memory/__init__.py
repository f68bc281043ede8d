"""Training in less memory.

release.py    gradients that are freed during the backward pass
offload.py    state in a memory-mapped file
"""
