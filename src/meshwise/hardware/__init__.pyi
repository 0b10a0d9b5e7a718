from meshwise.hardware import bench as bench
from meshwise.hardware import machines as machines
from meshwise.hardware import views as views
