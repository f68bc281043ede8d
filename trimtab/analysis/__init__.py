"""Numbers computed from run folders: for one run (spikes, lead times) and for many (curves, sensitivity, forecasts)."""
