"""A plugin for pytest: tests of the reference's `LocalREPL` get our environment."""

import rlm.environments
import rlm.environments.local_repl

from rlm_broker.integrations import rlms

rlms.install()
rlm.environments.LocalREPL = rlm.environments.local_repl.LocalREPL = rlms.SandboxREPL
