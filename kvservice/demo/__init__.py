"""`kvservice demo`: a real model whose keys and values are on workers."""
