"""What a step is made of: `layer.py` times one layer of a microbatch, `data.py` what replicas send each
other, `muon.py` what Muon adds to AdamW.
"""
