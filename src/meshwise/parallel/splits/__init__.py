"""Split tensors over a mesh axis; plain PyTorch code sees them whole.

Each rank of the axis holds a part of the tensor along one dim.

tensor.py      a split tensor, which shows the shape of the whole and holds the values of one part
crossing.py    the conversions between a split tensor and a whole one, with their gradients
rules.py       which operators run on the parts alone; before any other operator the parts are gathered, so that every
               program stays right
"""
