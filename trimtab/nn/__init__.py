"""Models and layers: SwitchBack linears, stable embedding, GPT and CLIP with every intervention as a switch."""
