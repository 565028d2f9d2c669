"""Flash attention on a GPU: `flash_triton.py` has the page's loops as kernels in Triton, and `tile.py`
what all three share.
"""
