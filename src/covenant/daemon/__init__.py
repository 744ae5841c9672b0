"""Settings, wiring, lifecycle, schedulers: the only code that picks backends or reads the environment."""
