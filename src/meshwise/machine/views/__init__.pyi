from meshwise.machine.views import bench as bench
from meshwise.machine.views import devices as devices
