"""Device code, its launchers, and the same in plain torch; one kernel family per module."""
