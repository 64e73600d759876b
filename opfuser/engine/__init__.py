"""What makes plans and executes them."""
