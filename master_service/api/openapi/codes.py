"""Which problems a master answers: status -> code -> what it means. A test compares it with the errors that masters raise."""

from __future__ import annotations

PROBLEMS: dict[int, dict[str, str]] = {
    400: {"INVALID_ARGUMENT": "The request's values are invalid, or do not fit together."},
    401: {"UNAUTHENTICATED": "No token was sent, or one that is not known."},
    403: {
        "PERMISSION_DENIED": "The token's role does not include this.",
        "ORIGIN_NOT_ALLOWED": "A web page of another site sent the request.",
    },
    404: {"NOT_FOUND": "What the path names does not exist."},
    409: {
        "CONFLICT": "The present state does not allow it.",
        "STALE_ATTEMPT": "The attempt is not the pending one any more: fetch a new task.",
        "STALE_GENERATION": "The membership has changed: read lanes and addresses again.",
    },
    410: {"CURSOR_EXPIRED": "The next event after the cursor is forgotten; `details` has the ids that are kept."},
    412: {"PRECONDITION_FAILED": "It has another version than If-Match says: it has changed. `details` has both."},
    413: {"TOO_LARGE": "The body is too large."},
    415: {"UNSUPPORTED_MEDIA_TYPE": "The body is not JSON."},
    421: {"HOST_NOT_ALLOWED": "The request names a host that this service is not."},
    422: {
        "INVALID_ARGUMENT": "A value is not as the schema says; `errors` names each one.",
        "IDEMPOTENCY_KEY_REUSED": "The key was used for another request before.",
        "DATASET_INVALID": "The dataset cannot be read, is empty, or does not fit.",
        "CHECKPOINT_UNUSABLE": "The checkpoint is damaged, incomplete, or of another job.",
    },
    429: {
        "TOO_MANY_REQUESTS": "As many streams, or reads of logs or of stored metrics, as the service allows are open."
    },
    500: {
        "INTERNAL": "The master failed at this request; its log has the reason.",
        "STATE_UNREADABLE": "This version cannot read one of the job's keys in etcd.",
    },
    503: {
        "UNAVAILABLE": "Another process or machine does not answer.",
        "NOT_LEADER": "A standby answered; `details.leader` is the leader's URL when known.",
        "NOT_READY": "The master has not taken over yet.",
        "STORAGE_UNREACHABLE": "The job's storage does not answer.",
    },
    504: {"DEADLINE_EXCEEDED": "etcd did not answer in time; send the same request again."},
}
RETRYABLE = frozenset({429, 503, 504})
