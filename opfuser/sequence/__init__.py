"""What a ``Sequential`` is made of: modules, their groups, and routes between them."""
