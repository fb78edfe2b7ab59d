"""The base of a provider's client."""

from typing import Any

from pydantic import BaseModel

from agents.sandbox.session import SandboxSession


class BaseSandboxClientOptions(BaseModel):
    """Options of a session."""

    type: str


class BaseSandboxClient:
    """Makes sessions, and text of their states."""

    def _validate_manifest_for_create(self, manifest: Any) -> None: ...

    def _wrap_session(self, inner: Any, *, instrumentation: Any) -> SandboxSession:
        assert instrumentation is not None
        return SandboxSession(inner)

    def serialize_session_state(self, state: Any) -> dict[str, object]:
        """Return plain values."""
        return dict(state.model_dump(mode="json"))

    @staticmethod
    def _deserialize_session_state_payload(payload: dict[str, object], kind: Any) -> Any:
        return kind.model_validate(payload)
