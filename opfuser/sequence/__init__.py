"""``Sequential``: its modules, their groups, and what is routed between them."""
