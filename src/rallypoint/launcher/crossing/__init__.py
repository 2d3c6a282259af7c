"""What crosses between the caller of `launch` and its ranks: what may, as what bytes, and how it arrives."""
