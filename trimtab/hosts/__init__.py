"""Other trainers: thin adapters."""
