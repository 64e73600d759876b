"""Calls that ``torch.compile`` or ``torch.export`` traces."""
