"""Attention of heads: the kernels that compute it, and which of them a call takes.

Dimensions: B batch, S queries, T keys, H query heads, K key and value heads, G = H / K, D entries
of a query or key head, V entries of a value head.
"""
