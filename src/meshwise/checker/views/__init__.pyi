from meshwise.checker.views import check_dict as check_dict
from meshwise.checker.views import check_github as check_github
from meshwise.checker.views import check_text as check_text
