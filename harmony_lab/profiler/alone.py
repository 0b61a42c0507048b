"""alone: held by the one thread that does what torch keeps in globals: exporting, hooks on all modules."""

import threading

__all__ = ["alone"]

alone = threading.RLock()
