"""How long a device computes: products by tiles and waves, attention by its kernel, experts as
groups of products, the rest by its bytes.

    products.py    one product, at the share of its precision's peak; or many small ones in one kernel
    attention.py   softmax(QK')V by a fused kernel, or as two products and the scores between them
    layer.py       a layer, forward and backward; the head and the loss
"""
