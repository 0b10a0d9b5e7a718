"""Split tensors over a mesh axis; plain PyTorch code sees them whole.

Each rank of the axis holds a part along one dim.

tensor.py      a split tensor: the shape of the whole, the values of a part
crossing.py    the four ways between a split tensor and a whole one, with their gradients
rules.py       which operators run on the parts alone; all others gather first, so that every program stays right
"""
