"""Keeps retrieval knowledge bases true: every change detected, embedded once, published whole, provable later."""

__version__ = "0.1.0"
