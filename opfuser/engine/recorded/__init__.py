"""Calls that were recorded, and run as functions that call nothing but torch."""
