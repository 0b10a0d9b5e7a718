from meshwise.timeline.views import follow as follow
from meshwise.timeline.views import report_text as report_text
from meshwise.timeline.views import run_comparison_text as run_comparison_text
from meshwise.timeline.views import run_list_text as run_list_text
from meshwise.timeline.views import summary_text as summary_text
