"""Checks objects against Kubernetes' own schemas, and against KubeRay's where its CRDs are here.

KubeRay's repository has them in helm-chart/kuberay-operator/crds; KUBERAY_CRDS names that folder.
"""

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

VERSION = "1.34"
CRDS = os.environ.get("KUBERAY_CRDS", "")
_FILES = {"RayJob": "ray.io_rayjobs.yaml", "RayCluster": "ray.io_rayclusters.yaml"}


def pod_templates(resource: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the template of the head, of each group of workers, and of the pod that submits."""
    spec = resource["spec"]
    if "template" in spec:
        yield spec["template"]
        return
    cluster = spec.get("rayClusterSpec", spec)
    yield cluster["headGroupSpec"]["template"]
    yield from (group["template"] for group in cluster["workerGroupSpecs"])
    if "submitterPodTemplate" in spec:
        yield spec["submitterPodTemplate"]


def check_crd(resource: Mapping[str, Any]) -> None:
    """Raise jsonschema.ValidationError if KubeRay's API refuses the object, or drops a field."""
    _validator(resource["kind"]).validate(resource)


@functools.cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    text = (Path(CRDS) / _FILES[kind]).read_text()
    crd = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [served] = [v for v in crd["spec"]["versions"] if v["name"] == "v1"]
    schema = _strict(served["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """Return a schema that refuses fields it does not know; the API drops or refuses them."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _strict(value) for key, value in schema.items()}
    open_ended = "additionalProperties" in schema or schema.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", bool(open_ended))
    return closed
