"""What surrounds a call: packages, compilers and modes of torch; no operation is known here."""
