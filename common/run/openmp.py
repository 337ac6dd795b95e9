"""Import this before torch: OpenMP's threads then sleep while they wait, unless the user chose otherwise.

By default they spin, which on a core that other processes want slows down the threads they wait for.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
