"""The adapters in `rlm_broker/integrations/` against the real packages that they are for."""
