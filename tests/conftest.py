"""The CUDA kernels run on Triton's interpreter here, also beside a GPU; TRITON_INTERPRET=0 leaves them out."""

import os
import signal

os.environ.setdefault("TRITON_INTERPRET", "1")
# a suite started in the background of a shell ignores Ctrl-C, and so would the programs that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
