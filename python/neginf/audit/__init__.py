"""What attention libraries really return where it matters: `python -m neginf audit`.

Every library that can be imported is probed with small inputs, each library in a process of its
own, and what comes back is described and held against docs/contract.md. Base and layout of the
log-sum-exp are found out, not assumed.

To add a library, write one subclass of :class:`Adapter` in a file and name it:
`python -m neginf audit --adapter my_library.py`.
"""

from neginf.audit.adapter import Adapter, NotOffered
from neginf.audit.runner import audit

__all__ = ["Adapter", "NotOffered", "audit"]
