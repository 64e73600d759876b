"""Operations without kernels that stand for basic operations."""
