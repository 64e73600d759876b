"""What a module computes: its own forward is traced, and every operation of it explained."""
