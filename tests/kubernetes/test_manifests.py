"""Manifests: golden files, the schemas of the API, kustomize, and what pods may and may not."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.kubernetes import manifests
from deepep_bootstrap.kubernetes.manifests import Inputs, Rendered
from deepep_bootstrap.kubernetes.settings import read_settings
from deepep_bootstrap.lock.model import ImagePin
from deepep_bootstrap.prefix.test_kinds import KINDS
from tests.support import extension_schemas
from tests.support.paths import CASES, ROOT
from tests.support.shipped import shipped_lock

KUBECTL = Path(sys.executable).parent / "kubectl"
GOLDEN = ROOT / "tests" / "golden" / "kubernetes"
LOCK = shipped_lock()
RECIPES, TEXTS = read_tree(ROOT / "recipes"), read_tree(ROOT / "env")
CLUSTERS = {"gke-a4": "v1", "gke-a3": "v1", "generic": "v2", "generic-host": "v1"}
"""Settings files of tests/cases/kubernetes, and the stack that each is rendered for."""

EXTENSIONS = frozenset(("GKENetworkParamSet", "JobSet", "LeaderWorkerSet", "Network"))
"""Kinds that kubernetes-validate does not know: their schemas are in tests/cases/kubernetes/schemas, and the pods and
Jobs inside them are held to those of the API. A Kustomization is read by kubectl itself."""
API = "1.34"
"""The first version with resource.k8s.io/v1."""


def rendered(name: str) -> Rendered:
    settings = read_settings(str(CASES / "kubernetes" / f"{name}.toml"), name.removesuffix("-host"))
    settings = replace(settings, path=f"{name}.toml")
    lock = replace(LOCK, images={"gib": ImagePin("registry.example/gib:v1.1.2", f"sha256:{'b' * 64}")})
    return manifests.render(Inputs(settings, lock, lock.stacks[CLUSTERS[name]], RECIPES, TEXTS))


@pytest.fixture(scope="module", params=CLUSTERS)
def cluster(request: pytest.FixtureRequest) -> tuple[str, Rendered]:
    return request.param, rendered(request.param)


def objects(made: Rendered) -> Iterator[dict[str, Any]]:
    for path, text in made.files.items():
        if path.endswith(".yaml"):
            yield from yaml.load_all(text, yaml.CSafeLoader)


def inner(thing: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects of the core API that an extension's object makes."""
    spec = thing["spec"] if thing["kind"] in {"JobSet", "LeaderWorkerSet"} else {}
    for job in spec.get("replicatedJobs", ()):
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
    if template := spec.get("leaderWorkerTemplate"):
        pod = template["workerTemplate"]
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}


def pods(made: Rendered) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the spec of every pod with the name of what makes it."""
    for thing in objects(made):
        for each in (thing, *inner(thing)):
            spec = each.get("spec", {})
            if each["kind"] in {"Job", "DaemonSet"}:
                yield thing["metadata"]["name"], spec["template"]["spec"]
            elif each["kind"] == "Pod":
                yield thing["metadata"]["name"], spec


def test_the_files_are_those_that_are_kept(cluster: tuple[str, Rendered]) -> None:
    """GOLDEN=write writes them. The script for nodes is recipes, which have tests of their own."""
    name, made = cluster
    kept = {path: text for path, text in made.files.items() if not path.endswith(".sh")}
    kept["pool.txt"] = f"{made.pool}\n"
    if os.environ.get("GOLDEN") == "write":
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        for path, text in kept.items():
            (GOLDEN / name / path).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name / path).write_text(text, encoding="utf-8")
    found = {str(path.relative_to(GOLDEN / name)): path for path in (GOLDEN / name).rglob("*") if path.is_file()}
    assert sorted(found) == sorted(kept)
    for path, text in kept.items():
        old = found[path].read_text(encoding="utf-8")
        assert old == text, "".join(difflib.unified_diff(old.splitlines(True), text.splitlines(True), path))


def test_objects_have_the_schema_of_the_api(cluster: tuple[str, Rendered]) -> None:
    checked = {kind for thing in objects(cluster[1]) for kind in held_to_schemas(thing)}
    assert {"Job", "JobSet", "LeaderWorkerSet", "Namespace", "Pod", "Service", "ServiceAccount"} <= checked
    networks = {"GKENetworkParamSet", "Network"}
    assert networks & checked == (networks if cluster[0] == "gke-a4" else set())  # gke-a3 claims its NICs


def held_to_schemas(thing: dict[str, Any]) -> Iterator[str]:
    """Hold an object and those inside it to their schemas; yield their kinds."""
    # Its schemas take seconds to load, which only these tests should wait for.
    import kubernetes_validate

    for each in (thing, *inner(thing)):
        if each["kind"] in EXTENSIONS:
            extension_schemas.check(each)
        elif each["kind"] != "Kustomization":
            kubernetes_validate.validate(each, API, strict=True)
        yield each["kind"]


def test_a_wrong_field_is_seen() -> None:
    import kubernetes_validate

    job = next(each for each in objects(rendered("gke-a4")) if each["kind"] == "Job")
    job["spec"]["backofLimit"] = 0
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        kubernetes_validate.validate(job, API, strict=True)


FAULTS = [
    ("JobSet", "spec.replicatedJob", [], "replicatedJob"),
    ("JobSet", "spec.network.publishNotReadyAddress", True, "publishNotReadyAddress"),
    ("JobSet", "spec.replicatedJobs.0.name", None, "'name' is a required property"),
    ("JobSet", "spec.failurePolicy.restartStrategy", "Always", "'Always' is not one of"),
    ("JobSet", "spec.failurePolicy.maxRestarts", "0", "'0' is not of type 'integer'"),
    ("JobSet", "spec.ttlSecondsAfterFinished", -1, "-1 is less than the minimum"),
    ("JobSet", "apiVersion", "jobset.x-k8s.io/v1", "'jobset.x-k8s.io/v1alpha2' was expected"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.sizes", 2, "sizes"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.workerTemplate", None, "'workerTemplate' is a required property"),
    ("LeaderWorkerSet", "spec.startupPolicy", "LeaderStarted", "'LeaderStarted' is not one of"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.restartPolicy", "Never", "'Never' is not one of"),
    ("LeaderWorkerSet", "spec.replicas", 2**31, "2147483648 is greater than the maximum"),
    ("Network", "spec.parameterRef", {}, "parameterRef"),
    ("Network", "spec.type", None, "'type' is a required property"),
    ("Network", "spec.type", "RDMA", "'RDMA' is not one of"),
    ("Network", "spec.parametersRef.name", None, "'name' is a required property"),
    ("Network", "spec.parametersRef.namespace", "default", "should not be valid under"),
    ("Network", "metadata.namespace", "default", "should not be valid under"),
    ("GKENetworkParamSet", "spec.subnet", "x", "subnet"),
    ("GKENetworkParamSet", "spec.vpcSubnet", None, "'vpcSubnet' is a required property"),
    ("GKENetworkParamSet", "spec.deviceMode", "Rdma", "'Rdma' is not one of"),
    ("GKENetworkParamSet", "spec.deviceMode", None, "not valid under any of the given schemas"),
    ("GKENetworkParamSet", "spec.podIPv4Ranges", {"rangeNames": ["pods"]}, "valid under each of"),
    ("GKENetworkParamSet", "spec.networkAttachment", "x", "'networkAttachment' was expected"),
]


@pytest.mark.parametrize(("kind", "place", "value", "message"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_fault_in_an_extensions_object_is_seen(kind: str, place: str, value: object, message: str) -> None:
    """None takes the field away."""
    thing = next(each for each in objects(rendered("gke-a4")) if each["kind"] == kind)
    extension_schemas.check(thing)
    *way, last = place.split(".")
    inside: Any = thing
    for step in way:
        inside = inside[int(step) if step.isdecimal() else step]
    if value is None:
        del inside[last]
    else:
        inside[last] = value
    from jsonschema import ValidationError

    with pytest.raises(ValidationError, match=message):
        extension_schemas.check(thing)


def test_jobset_takes_one_order_of_its_jobs_alone() -> None:
    thing = next(each for each in objects(rendered("gke-a4")) if each["kind"] == "JobSet")
    thing["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    extension_schemas.check(thing)
    thing["spec"]["replicatedJobs"][0]["dependsOn"] = [{"name": "other", "status": "Ready"}]
    from jsonschema import ValidationError

    with pytest.raises(ValidationError, match="should not be valid under"):
        extension_schemas.check(thing)


def test_facts_of_extensions_say_where_they_are_from() -> None:
    found = extension_schemas.facts()
    assert found.keys() == EXTENSIONS
    for fact in found.values():
        assert set(fact["source"]) == {"repository", "path", "commit"}
        assert len(fact["source"]["commit"]) == 40


def test_every_network_has_its_parameters() -> None:
    things = list(objects(rendered("gke-a4")))
    asked = [each["spec"]["parametersRef"]["name"] for each in things if each["kind"] == "Network"]
    there = [each["metadata"]["name"] for each in things if each["kind"] == "GKENetworkParamSet"]
    assert sorted(asked) == sorted(there)


def test_lines_fit_a_screen(cluster: tuple[str, Rendered]) -> None:
    for path, text in cluster[1].files.items():
        if path.endswith(".yaml"):
            assert max(map(len, text.splitlines())) <= 160, path
            assert text.endswith("\n"), path


@pytest.mark.usefixtures("programs")
def test_kustomize_builds_every_overlay(cluster: tuple[str, Rendered], tmp_path: Path) -> None:
    for path, text in cluster[1].files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    namespace = next(each["metadata"]["name"] for each in objects(cluster[1]) if each["kind"] == "Namespace")
    for folder in sorted(each.parent for each in tmp_path.rglob("kustomization.yaml")):
        done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        built = [each for each in yaml.safe_load_all(done.stdout) if each]
        spaces = {each["metadata"].get("namespace") for each in built} - {None}
        assert spaces <= ({"kube-system", "gpu-operator"} if folder.name == "cluster" else {namespace}), folder
        if folder.name == "cluster" and (folder / "node.sh").is_file():
            configs = {each["metadata"]["name"] for each in built if each["kind"] == "ConfigMap"}
            (node,) = (
                each for each in built if each["kind"] == "DaemonSet" and each["metadata"]["name"] == "deepep-node"
            )
            volumes = node["spec"]["template"]["spec"]["volumes"]
            assert {each["configMap"]["name"] for each in volumes if "configMap" in each} == configs


@pytest.mark.usefixtures("programs")
def test_the_script_for_nodes_is_bash() -> None:
    script = rendered("gke-a4").files["overlays/cluster/node.sh"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert len(script) < 900_000  # of the mebibyte that a ConfigMap may have
    asked = {"VERB": "check", "RECIPES": "peer-memory", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-s"], input=script, env=asked, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("recipe=peer-memory\n")
    assert "\nstate=" in done.stdout
    assert done.stdout.count("recipe=") == 1


def test_every_image_has_a_digest(cluster: tuple[str, Rendered]) -> None:
    for _, spec in pods(cluster[1]):
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            assert "@sha256:" in each["image"]


def test_pods_have_the_rights_that_they_need_and_no_more(cluster: tuple[str, Rendered]) -> None:
    for name, spec in pods(cluster[1]):
        assert spec["automountServiceAccountToken"] is False
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            rights = each["securityContext"]
            privileged = rights.get("privileged", False)
            allowed = name == "deepep-node" or (cluster[0] in {"gke-a3", "generic-host"} and name != "deepep-intranode")
            assert not privileged or allowed, name
            if not privileged:
                assert rights["allowPrivilegeEscalation"] is False
                assert rights["capabilities"]["drop"] == ["ALL"]
        if name == "deepep-intranode":
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert "add" not in spec["containers"][0]["securityContext"]["capabilities"]


def test_pods_on_nodes_may_write_on_their_own_node_alone() -> None:
    made = {
        (each["kind"], each["metadata"]["name"]): each for each in objects(rendered("gke-a4")) if "metadata" in each
    }
    daemon = made["DaemonSet", "deepep-node"]["spec"]["template"]["spec"]
    assert daemon["serviceAccountName"] == made["ServiceAccount", "deepep-node"]["metadata"]["name"]
    (rule,) = made["ClusterRole", "deepep-node"]["rules"]
    assert rule == {"apiGroups": [""], "resources": ["nodes", "nodes/status"], "verbs": ["patch"]}
    policy = made["ValidatingAdmissionPolicy", "deepep-node"]["spec"]
    assert policy["failurePolicy"] == "Fail"
    (whose,) = policy["matchConditions"]
    assert "system:serviceaccount:kube-system:deepep-node" in whose["expression"]
    whose_node, what = policy["validations"]
    assert whose_node["expression"].endswith("== object.metadata.name")
    assert what["expression"] == "object.spec == oldObject.spec"
    assert made["ValidatingAdmissionPolicyBinding", "deepep-node"]["spec"]["validationActions"] == ["Deny"]
    mounts = {each["name"]: [mount["name"] for mount in each.get("volumeMounts", ())] for each in daemon["containers"]}
    assert mounts == {"stay": []}, "who stays has no token"


def test_tests_between_nodes_have_an_end_and_their_own_nodes(cluster: tuple[str, Rendered]) -> None:
    for thing in objects(cluster[1]):
        for job in (each for each in (thing, *inner(thing)) if each["kind"] == "Job"):
            assert job["spec"]["backoffLimit"] == 0
            assert job["spec"]["activeDeadlineSeconds"] > 0
    for name, spec in pods(cluster[1]):
        if name not in {"deepep-node", "deepep-gib"}:
            (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert rule["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == name


def test_the_first_node_has_the_name_that_others_look_for() -> None:
    made = rendered("gke-a4")
    for thing in objects(made):
        if thing["kind"] not in {"Job", "JobSet"} or "internode" not in thing["metadata"]["name"]:
            continue
        job = thing if thing["kind"] == "Job" else next(iter(inner(thing)))
        values = {each["name"]: each.get("value") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
        if thing["kind"] == "Job":
            service = next(each for each in objects(made) if each["kind"] == "Service")
            assert service["spec"]["publishNotReadyAddresses"] is True
            assert values["MASTER_ADDR"] == f"{thing['metadata']['name']}-0.{service['metadata']['name']}"
        else:
            group = thing["spec"]["replicatedJobs"][0]["name"]
            network = thing["spec"]["network"]
            assert values["MASTER_ADDR"] == f"{thing['metadata']['name']}-{group}-0-0.{network['subdomain']}"


def test_every_variable_has_its_reason_and_that_of_invoke_env(cluster: tuple[str, Rendered]) -> None:
    text = next(text for path, text in cluster[1].files.items() if path.endswith("internode-job/job.yaml"))
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines):
        if line.startswith("- name: ") and line.split()[-1].isupper():
            assert lines[number - 1].startswith("# "), line
    assert "GPU threads ring the NIC's doorbell" in text


def test_v25_has_its_own_test_and_no_nvshmem() -> None:
    settings = read_settings(str(CASES / "kubernetes" / "generic.toml"), "generic")
    stack = LOCK.stacks["v2"]
    source = replace(LOCK.sources[stack.deepep], version="2.5.0")
    lock = replace(LOCK, sources={**LOCK.sources, stack.deepep: source})
    made = manifests.render(Inputs(settings, lock, stack, RECIPES, TEXTS))
    assert not any("low-latency" in path for path in made.files)  # V2.5 has no such test
    text = made.files["overlays/internode-job/job.yaml"]
    assert "EP_JIT_CACHE_DIR" in text
    assert "NVSHMEM_" not in text
    assert "EP_DEFAULT_RDMA_SL" in text


def test_gke_networks_are_one_for_each_nic() -> None:
    things = list(objects(rendered("gke-a4")))
    pairs = {each["metadata"]["name"] for each in things if each["kind"] == "Network"}
    assert pairs == {"gvnic-1", *(f"rdma-{number}" for number in range(8))}
    job = next(each for each in things if each["kind"] == "Job" and each["metadata"]["name"] == "deepep-internode")
    notes = job["spec"]["template"]["metadata"]["annotations"]
    interfaces = json.loads(notes["networking.gke.io/interfaces"])
    assert [each["network"] for each in interfaces[1:]] == [f"rdma-{number}" for number in range(8)]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("", "no image is named"),
        ("registry.example/deepep:latest", "the image is named without its digest"),
        ("registry.example/deepep@sha256:abc", "this names no image"),
    ],
)
def test_an_image_without_a_digest_is_refused(image: str, message: str) -> None:
    settings = replace(read_settings(str(CASES / "kubernetes" / "generic-host.toml"), "generic"), image=image)
    with pytest.raises(Trouble, match=f"generic-host.toml: image: {message}.*Try: invoke image --push"):
        manifests.render(Inputs(settings, LOCK, LOCK.stacks["v1"], RECIPES, TEXTS))


def test_gib_without_a_digest_is_refused() -> None:
    settings = read_settings(str(CASES / "kubernetes" / "gke-a4.toml"), "gke-a4")
    lock = replace(LOCK, images={"gib": ImagePin("registry.example/gib:v1", "")})
    with pytest.raises(Trouble, match=r"image\.gib: the lock has no digest.*Try: invoke lock --update=image\.gib"):
        manifests.render(Inputs(settings, lock, lock.stacks["v1"], RECIPES, TEXTS))


RUN = "20261122T210000Z-internode-1a2b3c"


def followed(name: str, kind: str, nodes: int, **settings: str) -> tuple[str, list[dict[str, Any]]]:
    """The objects of one test that is followed, as text and as values."""
    asked = read_settings(str(CASES / "kubernetes" / f"{name}.toml"), name.removesuffix("-host"))
    inputs = Inputs(replace(asked, path=f"{name}.toml", **settings), LOCK, LOCK.stacks[CLUSTERS[name]], {}, TEXTS)
    run = RUN.replace("internode", kind)
    work = manifests.followed(inputs, KINDS[kind], run, nodes=nodes, seconds=600, words=("--num-tokens", "64"))
    text = manifests.render_test(inputs, work)
    return text, [each for each in yaml.safe_load_all(text) if each]


FOLLOWED = [
    ("gke-a4", "internode", 2, "job"),
    ("gke-a3", "internode", 4, "jobset"),
    ("gke-a4", "intranode", 1, "job"),
    ("generic", "ep", 2, "job"),
    ("generic-host", "pressure", 1, "job"),
    ("generic-host", "pairs", 3, "jobset"),
]


@pytest.mark.parametrize(("name", "kind", "nodes", "form"), FOLLOWED, ids=lambda value: str(value))
def test_a_test_that_is_followed_needs_nothing_of_another_run(name: str, kind: str, nodes: int, form: str) -> None:
    text, found = followed(name, kind, nodes, internode=form)
    golden = GOLDEN.parent / "kubernetes-run" / f"{name}-{kind}.yaml"
    if os.environ.get("GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == text
    own = f"deepep-{kind}-1a2b3c"
    assert {each["metadata"]["name"] for each in found} == {own}
    for each in found:
        assert each["kind"] in held_to_schemas(each)
    workload = found[-1]
    job = workload["spec"]["replicatedJobs"][0]["template"] if form == "jobset" else workload
    template = job["spec"]["template"]
    assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == RUN.replace("internode", kind)
    assert template["spec"]["serviceAccountName"] == own
    (container,) = template["spec"]["containers"]
    assert container["args"] == ["test", kind, "--num-tokens", "64"]
    variables = {each["name"]: each for each in container["env"]}
    assert variables["DEEPEP_NODE"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert ("DEEPEP_TEST_SECONDS" in variables) == (kind == "pressure")
    if nodes > 1:
        first = f"{own}-0" if form == "job" else f"{own}-nodes-0-0"
        assert variables["MASTER_ADDR"]["value"] == f"{first}.{own}"


def test_a_stack_without_such_a_test_is_refused() -> None:
    with pytest.raises(Trouble, match="--kind: the stack v1 has no such test — found ep"):
        followed("gke-a4", "ep", 2)
    with pytest.raises(Trouble, match="--nodes: the internode test cannot run on that many nodes"):
        followed("gke-a4", "internode", 1)
