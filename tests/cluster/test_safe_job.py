"""Workers of Ray do not get the controller's folders before the standard library."""

from mcore_rl.cluster.session import SafeJob


def test_folders_of_the_controller_are_not_sent() -> None:
    job = SafeJob(metadata={"who": "me"})
    job._py_driver_sys_path.extend(["/mine", "/mine/bin"])  # as ray.init does
    assert b"/mine" not in bytes(job._serialize())  # type: ignore[arg-type]
    sent = job._get_proto_job_config()
    assert list(sent.py_driver_sys_path) == [] and dict(sent.metadata) == {"who": "me"}
