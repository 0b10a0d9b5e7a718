from meshwise.hardware.views import bench as bench
from meshwise.hardware.views import devices as devices
