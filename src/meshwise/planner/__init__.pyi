from meshwise.planner import options as options
from meshwise.planner import plan as plan
