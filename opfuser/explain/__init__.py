"""What a plan says: one view of it, and its text, reasons and files."""
