"""What a step is made of: `layer.py` times one layer of a microbatch, `stages.py` the stages that
layers make and what they wait for each other, `data.py` what replicas send each other.
"""
