"""A toy strategy, as somebody would add it: gradients are clipped by value before they are reduced."""
