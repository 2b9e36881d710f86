"""KubeRay's input, as far as rlctl writes it: a cut of its published schemas, with unknown fields as errors.

Sources, all of github.com/ray-project/kuberay:
- RayCluster v1: helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml at 017710c025a86af5225c0e68cd78fb06e2918296:
  names, types, enums, required fields, the pattern of quantities. It has authOptions, for which Ray's documentation
  asks for KubeRay 1.6.0 (docs.ray.io/en/master/kuberay/user-guides/auth.html).
- RayJob v1: ray-operator/apis/ray/v1/rayjob_types.go at f6ef3f7b32639dc6555797512d7cb784bd436901; its rayClusterSpec is
  the RayCluster's spec.
- rayStartParams is required in ray-operator/apis/ray/v1/raycluster_types.go at
  3275ee09f6a6c899c37e82ea6349785536de6bd4, and not any more in the first: rlctl keeps that rule.
A pod's fields are Kubernetes' own (core/v1), which these schemas hold in full.
"""

import re
from typing import Any

TEXT: dict[str, Any] = {"type": str}
WHOLE: dict[str, Any] = {"type": int}
FLAG: dict[str, Any] = {"type": bool}
# In the schema: anyOf integer, string; x-kubernetes-int-or-string.
QUANTITY: dict[str, Any] = {
    "type": (int, str),
    "pattern": r"(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?",
}


def thing(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"fields": fields, "required": required}


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"items": item}


def texts(value: dict[str, Any] = TEXT) -> dict[str, Any]:
    """A mapping with keys of any name."""
    return {"values": value}


def one_of(*words: str) -> dict[str, Any]:
    return {"type": str, "enum": words}


POD = thing(
    metadata=thing(annotations=texts(), labels=texts(), name=TEXT, namespace=TEXT, finalizers=many(TEXT)),
    spec=thing(
        ("containers",),
        containers=many(
            thing(
                ("name",),
                name=TEXT,
                image=TEXT,
                command=many(TEXT),
                args=many(TEXT),
                env=many(thing(("name",), name=TEXT, value=TEXT)),
                envFrom=many(thing(prefix=TEXT, secretRef=thing(name=TEXT, optional=FLAG))),
                resources=thing(limits=texts(QUANTITY), requests=texts(QUANTITY)),
                securityContext=thing(allowPrivilegeEscalation=FLAG, privileged=FLAG),
                volumeMounts=many(thing(("mountPath", "name"), name=TEXT, mountPath=TEXT, readOnly=FLAG)),
            )
        ),
        volumes=many(
            thing(
                ("name",),
                name=TEXT,
                emptyDir=thing(medium=TEXT, sizeLimit=QUANTITY),
                persistentVolumeClaim=thing(("claimName",), claimName=TEXT, readOnly=FLAG),
            )
        ),
        nodeSelector=texts(),
        tolerations=many(thing(key=TEXT, operator=TEXT, value=TEXT, effect=TEXT, tolerationSeconds=WHOLE)),
        imagePullSecrets=many(thing(name=TEXT)),
        serviceAccountName=TEXT,
        automountServiceAccountToken=FLAG,
        hostNetwork=FLAG,
    ),
)
CLUSTER_SPEC = thing(
    ("headGroupSpec",),
    authOptions=thing(enableK8sTokenAuth=FLAG, mode=one_of("disabled", "token")),
    enableInTreeAutoscaling=FLAG,
    headGroupSpec=thing(
        ("template", "rayStartParams"),
        enableIngress=FLAG,
        rayStartParams=texts(),
        serviceType=TEXT,
        template=POD,
    ),
    managedBy=TEXT,
    rayVersion=TEXT,
    suspend=FLAG,
    workerGroupSpecs=many(
        thing(
            ("groupName", "maxReplicas", "minReplicas", "template", "rayStartParams"),
            groupName=TEXT,
            replicas=WHOLE,
            minReplicas=WHOLE,
            maxReplicas=WHOLE,
            numOfHosts=WHOLE,
            idleTimeoutSeconds=WHOLE,
            rayStartParams=texts(),
            suspend=FLAG,
            template=POD,
        )
    ),
)
METADATA = thing(("name",), name=TEXT, namespace=TEXT, labels=texts(), annotations=texts())
RAY_CLUSTER = thing(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("ray.io/v1"),
    kind=one_of("RayCluster"),
    metadata=METADATA,
    spec=CLUSTER_SPEC,
)
RAY_JOB = thing(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("ray.io/v1"),
    kind=one_of("RayJob"),
    metadata=METADATA,
    spec=thing(
        activeDeadlineSeconds=WHOLE,
        backoffLimit=WHOLE,
        clusterSelector=texts(),
        entrypoint=TEXT,
        entrypointNumCpus={"type": (int, float)},
        entrypointNumGpus={"type": (int, float)},
        entrypointResources=TEXT,
        jobId=TEXT,
        managedBy=TEXT,
        metadata=texts(),
        rayClusterSpec=CLUSTER_SPEC,
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes=FLAG,
        submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode"),
        suspend=FLAG,
        ttlSecondsAfterFinished=WHOLE,
    ),
)


def faults(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """A line for each value that contradicts the schema."""
    if "fields" in schema:
        if not isinstance(value, dict):
            return [f"{path}: not a section"]
        found = [f"{path}.{name}: missing" for name in schema["required"] if name not in value]
        for name, each in value.items():
            known = schema["fields"].get(name)
            found += faults(each, known, f"{path}.{name}") if known else [f"{path}.{name}: unknown field"]
        return found
    if "items" in schema or "values" in schema:
        kind: type[Any] = list if "items" in schema else dict
        if not isinstance(value, kind):
            return [f"{path}: not a {kind.__name__}"]
        pairs = enumerate(value) if isinstance(value, list) else value.items()
        inner = schema.get("items") or schema["values"]
        return [line for key, each in pairs for line in faults(each, inner, f"{path}.{key}")]
    # A boolean is a number to Python, and none to Kubernetes.
    if not isinstance(value, schema["type"]) or (isinstance(value, bool) and schema["type"] is not bool):
        return [f"{path}: {value!r} is of the wrong type"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{path}: {value!r} is none of {schema['enum']}"]
    if "pattern" in schema and not re.fullmatch(schema["pattern"], str(value)):
        return [f"{path}: {value!r} is no quantity"]
    return []
