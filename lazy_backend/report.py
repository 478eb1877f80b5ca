"""`python -m lazy_backend.report run.jsonl`: write the report page of a logged run. See `diagnostics.page.main`.

In Python code, `lazy_backend.report` is the function from `diagnostics.page`. Importing this file as a module would
shadow the function, so the import raises `ImportError`.
"""

import sys

from lazy_backend.diagnostics.page import main

if __name__ != "__main__":
    raise ImportError("lazy_backend.report is a function and a command: from lazy_backend import report")

sys.exit(main())
