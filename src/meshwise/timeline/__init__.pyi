from meshwise.timeline import compare_runs as compare_runs
from meshwise.timeline import views as views
