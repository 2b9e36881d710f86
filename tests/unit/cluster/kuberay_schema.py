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
INTEGER: dict[str, Any] = {"type": int}
FLAG: dict[str, Any] = {"type": bool}
# In the schema: anyOf integer, string; x-kubernetes-int-or-string.
QUANTITY: dict[str, Any] = {
    "type": (int, str),
    "pattern": r"(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?",
}


def section(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"fields": fields, "required": required}


def array(schema: dict[str, Any]) -> dict[str, Any]:
    return {"items": schema}


def mapping(schema: dict[str, Any] = TEXT) -> dict[str, Any]:
    """Return the schema of a mapping with keys of any name."""
    return {"values": schema}


def choice(*words: str) -> dict[str, Any]:
    return {"type": str, "enum": words}


POD = section(
    metadata=section(annotations=mapping(), labels=mapping(), name=TEXT, namespace=TEXT, finalizers=array(TEXT)),
    spec=section(
        ("containers",),
        containers=array(
            section(
                ("name",),
                name=TEXT,
                image=TEXT,
                command=array(TEXT),
                args=array(TEXT),
                env=array(section(("name",), name=TEXT, value=TEXT)),
                envFrom=array(section(prefix=TEXT, secretRef=section(name=TEXT, optional=FLAG))),
                resources=section(limits=mapping(QUANTITY), requests=mapping(QUANTITY)),
                securityContext=section(allowPrivilegeEscalation=FLAG, privileged=FLAG),
                volumeMounts=array(section(("mountPath", "name"), name=TEXT, mountPath=TEXT, readOnly=FLAG)),
            )
        ),
        volumes=array(
            section(
                ("name",),
                name=TEXT,
                emptyDir=section(medium=TEXT, sizeLimit=QUANTITY),
                persistentVolumeClaim=section(("claimName",), claimName=TEXT, readOnly=FLAG),
            )
        ),
        nodeSelector=mapping(),
        tolerations=array(section(key=TEXT, operator=TEXT, value=TEXT, effect=TEXT, tolerationSeconds=INTEGER)),
        imagePullSecrets=array(section(name=TEXT)),
        serviceAccountName=TEXT,
        automountServiceAccountToken=FLAG,
        hostNetwork=FLAG,
    ),
)
CLUSTER_SPEC = section(
    ("headGroupSpec",),
    authOptions=section(enableK8sTokenAuth=FLAG, mode=choice("disabled", "token")),
    enableInTreeAutoscaling=FLAG,
    headGroupSpec=section(
        ("template", "rayStartParams"),
        enableIngress=FLAG,
        rayStartParams=mapping(),
        serviceType=TEXT,
        template=POD,
    ),
    managedBy=TEXT,
    rayVersion=TEXT,
    suspend=FLAG,
    workerGroupSpecs=array(
        section(
            ("groupName", "maxReplicas", "minReplicas", "template", "rayStartParams"),
            groupName=TEXT,
            replicas=INTEGER,
            minReplicas=INTEGER,
            maxReplicas=INTEGER,
            numOfHosts=INTEGER,
            idleTimeoutSeconds=INTEGER,
            rayStartParams=mapping(),
            suspend=FLAG,
            template=POD,
        )
    ),
)
METADATA = section(("name",), name=TEXT, namespace=TEXT, labels=mapping(), annotations=mapping())
RAY_CLUSTER = section(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=choice("ray.io/v1"),
    kind=choice("RayCluster"),
    metadata=METADATA,
    spec=CLUSTER_SPEC,
)
RAY_JOB = section(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=choice("ray.io/v1"),
    kind=choice("RayJob"),
    metadata=METADATA,
    spec=section(
        activeDeadlineSeconds=INTEGER,
        backoffLimit=INTEGER,
        clusterSelector=mapping(),
        entrypoint=TEXT,
        entrypointNumCpus={"type": (int, float)},
        entrypointNumGpus={"type": (int, float)},
        entrypointResources=TEXT,
        jobId=TEXT,
        managedBy=TEXT,
        metadata=mapping(),
        rayClusterSpec=CLUSTER_SPEC,
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes=FLAG,
        submissionMode=choice("K8sJobMode", "HTTPMode", "InteractiveMode"),
        suspend=FLAG,
        ttlSecondsAfterFinished=INTEGER,
    ),
)


def faults(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Return a line for each value that contradicts the schema."""
    if "fields" in schema:
        if not isinstance(value, dict):
            return [f"{path}: not a section"]
        lines = [f"{path}.{name}: missing" for name in schema["required"] if name not in value]
        for name, field in value.items():
            field_schema = schema["fields"].get(name)
            if field_schema:
                lines += faults(field, field_schema, f"{path}.{name}")
            else:
                lines.append(f"{path}.{name}: unknown field")
        return lines
    if "items" in schema or "values" in schema:
        kind: type[Any] = list if "items" in schema else dict
        if not isinstance(value, kind):
            return [f"{path}: not a {kind.__name__}"]
        entries = enumerate(value) if isinstance(value, list) else value.items()
        entry_schema = schema.get("items") or schema["values"]
        lines = []
        for key, entry in entries:
            lines += faults(entry, entry_schema, f"{path}.{key}")
        return lines
    # A boolean is a number to Python, and none to Kubernetes.
    if not isinstance(value, schema["type"]) or (isinstance(value, bool) and schema["type"] is not bool):
        return [f"{path}: {value!r} is of the wrong type"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{path}: {value!r} is none of {schema['enum']}"]
    if "pattern" in schema and not re.fullmatch(schema["pattern"], str(value)):
        return [f"{path}: {value!r} is no quantity"]
    return []
