from meshwise.machine.views import bench_dict as bench_dict
from meshwise.machine.views import bench_text as bench_text
from meshwise.machine.views import devices_text as devices_text
from meshwise.machine.views import links_text as links_text
from meshwise.machine.views import machine_dict as machine_dict
from meshwise.machine.views import progress as progress
