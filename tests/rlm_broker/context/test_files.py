"""Files, folders and globs as texts. Any other kind of file is refused or counted, and never waited for."""

import contextlib
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_broker.context.files import SECRET, is_secret
from rlm_broker.context.store import Encoded, Paths, store
from rlm_broker.context.stored_context import MAX_NAME_CHARS
from tests.support.contexts import fd_of, form_of, found_in, loaded, refused, value_of, written

MB = 1 << 20


@contextlib.contextmanager
def ordinary_user_folder() -> Iterator[Path]:
    """A folder of an unprivileged user, whom the permissions of files bind; root may read every file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        user = 65534 if os.geteuid() == 0 else os.geteuid()
        if os.geteuid() == 0:
            os.chown(folder, user, -1)
        before = os.geteuid()
        os.seteuid(user)
        try:
            yield Path(folder)
        finally:
            os.seteuid(before)


# -- one file --------------------------------------------------------------------------------------------------------


def test_file_in_small_pieces_is_read_whole_without_its_byte_order_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.read
    path = written(tmp_path / "file", "\ufeff\ufeffa\xe9\u20ac\U0001f600\ufeff".encode())
    for most in (1, 2, 3, 4, 100):
        monkeypatch.setattr(os, "read", lambda fd, size, most=most: read(fd, min(size, most)))
        assert value_of(path) == "\ufeffa\xe9\u20ac\U0001f600\ufeff"


NO_TEXTS = {
    b"a" * 123 + b"\xff": "not UTF-8 text: byte 0xff at offset 123; convert it (iconv -t UTF-8)",
    b"a" * (2 * MB) + b"\xe2\x82": "not UTF-8 text: byte 0xe2 at offset 2,097,152; convert it (iconv -t UTF-8)",
    b"a" * (MB - 1) + b"\xe2\x82a": "not UTF-8 text: byte 0xe2 at offset 1,048,575; convert it (iconv -t UTF-8)",
    b"\xef\xbb\xbf\xe9": "not UTF-8 text: byte 0xe9 at offset 3; convert it (iconv -t UTF-8)",
    b"\xed\xa0\xbd": "not UTF-8 text: byte 0xed at offset 0; convert it (iconv -t UTF-8)",
    b"\x7fELF\0": "binary (a zero byte at offset 4), not text: convert it to UTF-8 text, or name its encoding",
    b"a" * MB
    + b"\0": "binary (a zero byte at offset 1,048,576), not text: convert it to UTF-8 text, or name its encoding",
    b"": "empty: give a file that has text",
    b"\xef\xbb\xbf": "empty: give a file that has text",
}


def test_file_that_is_no_text_is_refused_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content, sentence in NO_TEXTS.items():
        written(Path("file"), content)
        assert refused(Encoded(Path("file"), errors="strict")) == f"file is {sentence}"


def test_irregular_file_is_refused_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("sock")
        for path, kind in (("pipe", "a named pipe"), ("sock", "a socket"), ("/dev/zero", "a device")):
            assert refused(Path(path)) == f"{path} is {kind}, not a file: read it first, and hand in its text"


@pytest.mark.timeout(60)
def test_file_replaced_by_a_pipe_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "file")
    open_file = os.open

    def replace_and_open(name: str, flags: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return open_file(name, flags)

    monkeypatch.setattr(os, "open", replace_and_open)
    refused(path, "file is a named pipe, not a file")


def test_unreadable_path_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("file"))
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    for path, sentence in (
        ("missing", "missing does not exist"),
        ("dangling", "dangling does not exist"),
        ("file/below", "file/below cannot be read: Not a directory"),
        ("loop", "loop cannot be read: Too many levels of symbolic links"),
        ("a" * 300, f"{'a' * 300} cannot be read: File name too long"),
        ("zero\0byte", "'zero\\x00byte' cannot be read: no path has a zero byte in it"),
        ("/proc/self/mem", "/proc/self/mem cannot be read: Input/output error"),
        (os.fsdecode(b"not-\xff-there"), "not-\\xff-there does not exist"),
    ):
        assert refused(Path(path)) == sentence
    with ordinary_user_folder() as folder:
        secret = written(folder / "secret")
        secret.chmod(0)
        refused(secret, "secret cannot be read: Permission denied")


def test_proc_file_without_size_is_read() -> None:
    assert value_of(Path("/proc/self/status")).startswith("Name:")


def test_a_tree_deeper_than_pythons_stack_is_walked(tmp_path: Path) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        for _ in range(1_100):
            os.mkdir("d")  # noqa: PTH102 - relative to a folder whose whole path is too long to say
            os.chdir("d")
        Path("file").write_text("deep")
    finally:
        os.chdir(before)
    with store(tmp_path) as stored:
        assert loaded(stored) == {"d/" * 1_100 + "file": "deep"}
        assert len(stored.info.parts[0][0]) == MAX_NAME_CHARS
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)


def test_file_that_changes_while_read_is_consistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.read
    path = written(tmp_path / "log", b"a" * (4 * MB))

    def grown(fd: int, size: int) -> bytes:
        piece = read(fd, size)
        with path.open("ab") as file:
            file.write(b"\xff" * MB)
        return piece

    def shrunk(fd: int, size: int) -> bytes:
        piece = read(fd, size)
        os.truncate(path, MB)
        return piece

    monkeypatch.setattr(os, "read", grown)
    assert value_of(path) == "a" * (4 * MB)
    monkeypatch.setattr(os, "read", shrunk)
    assert value_of(path) == "a" * MB
    path.write_bytes(b"")
    written(tmp_path / "other", "other")
    monkeypatch.setattr(os, "read", grown)
    assert value_of(tmp_path) == {"log": "", "other": "other"}


# -- many files ------------------------------------------------------------------------------------------------------


def test_folder_is_a_sorted_dict_of_texts(tmp_path: Path) -> None:
    written(tmp_path / "b.txt", "b")
    written(tmp_path / "a" / "deep" / "x.py", '\U0001f600 "quoted"\n\\\x01' * 100_000)
    written(tmp_path / ".hidden", "")
    with store(tmp_path) as stored:
        value = loaded(stored)
        assert value == {".hidden": "", "a/deep/x.py": '\U0001f600 "quoted"\n\\\x01' * 100_000, "b.txt": "b"}
        assert (list(value), stored.info.type_name) == (sorted(value), "dict")
        assert stored.info.parts == ((".hidden", 0), ("a/deep/x.py", 1_300_000), ("b.txt", 1))
        assert (stored.info.total_chars, stored.info.skipped) == (1_300_001, {})


def test_skipped_files_are_counted_by_reason(tmp_path: Path) -> None:
    written(tmp_path / "outside", "secret")
    root = tmp_path / "root"
    written(root / "good", "good")
    written(root / "picture.png", b"\x89PNG\0")
    written(root / "latin.txt", b"a" * (2 * MB) + b"\xe9 late")
    written(root / "zzz", "last")
    written(root / ".git" / "config", "never")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "up").symlink_to("..")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    assert found_in(Encoded(root, errors="strict")) == (
        {"good": "good", "zzz": "last"},
        {"binary": 1, "not UTF-8": 1, "link to outside the folder": 2, "unreadable": 2, "not a regular file": 1},
    )


def test_files_and_folders_without_permission_are_counted_as_unreadable() -> None:
    """A glob skips folders that cannot match."""
    with ordinary_user_folder() as folder:
        written(folder / "good", "good")
        written(folder / "secret").chmod(0)
        written(folder / "closed" / "file").parent.chmod(0)
        try:
            assert found_in(folder) == ({"good": "good"}, {"unreadable": 2})
            assert found_in(folder / "g*") == ({"good": "good"}, {})
        finally:
            (folder / "closed").chmod(0o700)


def test_links_in_a_folder_are_followed_safely(tmp_path: Path) -> None:
    """Links inside a folder never loop, double a file or reach an excluded file."""
    written(tmp_path / "a" / "file", "text")
    written(tmp_path / ".git" / "config", "token")
    written(tmp_path / ".env", "key")
    written(tmp_path / ".gitignore", ".env\n")
    links = {"self": ".", "a/up": "..", "a/again": "../a", "z": "a/file", "git": ".git/config", "env": ".env"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    assert found_in(tmp_path) == ({".gitignore": ".env\n", "a/file": "text"}, {"ignored by .gitignore": 3})
    assert value_of(tmp_path / "z*") == {"z": "text"}


GITIGNORES = {
    ".gitignore": "*.log\r\n/build/\nnode_modules/\n!keep.log\ndoc/*.txt\n# comment\n\\#odd\n!\ndata/** \n!data/keep\n",
    "sub/.gitignore": "!local.log\n/only_here\n*\n!*.py\n!*/\n!.gitignore\n",
}
TREE = [
    *("a.log", "keep.log", "build/x", "sub/build/x.py", "node_modules/m/i.js", "sub/node_modules/m.py", "doc/a.txt"),
    *("doc/deep/a.txt", "#odd", "sub/local.log", "sub/only_here", "sub/code.py", "sub/x/code.py", "sub/x/data.bin"),
    "plain",
]


@pytest.mark.skipif(shutil.which("git") is None, reason="git says what is right")
def test_folder_holds_the_files_git_would_take(tmp_path: Path) -> None:
    for name, text in GITIGNORES.items():
        written(tmp_path / name, text)
    for name in TREE:
        written(tmp_path / name, name)
    git = ["git", "-C", str(tmp_path), "-c", "core.excludesFile=/dev/null"]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "ls-files", "-co", "--exclude-standard", "-z"], check=True, capture_output=True, text=True
    )
    expected = listed.stdout.split("\0")[:-1]
    assert "sub/code.py" in expected
    assert "sub/only_here" not in expected
    with store(tmp_path) as stored:
        assert list(loaded(stored)) == sorted(expected)


def test_folder_obeys_the_surrounding_gitignore(tmp_path: Path) -> None:
    """A folder in a repository obeys the rules around it unless they exclude the folder itself."""
    written(tmp_path / ".git" / "HEAD")
    written(tmp_path / ".gitignore", "*.pyc\nbuild/\n")
    written(tmp_path / "src" / "a.py", "a")
    written(tmp_path / "src" / "a.pyc", "compiled")
    written(tmp_path / "build" / "out.pyc", "made")
    assert found_in(tmp_path / "src") == ({"a.py": "a"}, {"ignored by .gitignore": 1})
    assert value_of(tmp_path / "build") == {"out.pyc": "made"}


def test_odd_gitignore_is_harmless(tmp_path: Path) -> None:
    written(tmp_path / ".gitignore", b"!\n\xff\xfe\0\n*.log\n///\n[\n[z-a]\n\\")
    written(tmp_path / "a.log")
    written(tmp_path / "file")
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "sub" / ".gitignore")
    written(tmp_path / "sub" / "b.txt")
    with store(tmp_path) as stored:
        assert set(loaded(stored)) == {"file", "sub/b.txt"}
        assert stored.info.skipped == {"ignored by .gitignore": 1, "binary": 1, "not a regular file": 1}


GLOBS = [
    ("*.py", ["a.py"]),
    ("s*/?.py", ["src/b.py", "src/c.py"]),
    ("src/*.py", ["b.py", "c.py"]),
    ("src/[!c]*", ["b.py"]),
    ("**/*.py", ["a.py", "src/b.py", "src/c.py", "src/x/y/d.py"]),
    ("src/**", ["b.py", "c.py", "x/y/d.py"]),
    ("src/**/y/*.py", ["x/y/d.py"]),
    ("**/**/x/**/**/d.py", ["src/x/y/d.py"]),
    ("**/src/**/**", ["src/b.py", "src/c.py", "src/x/y/d.py"]),
    ("s*/**/*/**/*.py", ["src/x/y/d.py"]),
    ("**/*/y/**", ["src/x/y/d.py"]),
]


def test_glob_is_a_dict_of_matching_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "a.txt", "src/b.py", "src/c.py", "src/x/y/d.py", "venv/v.py"):
        written(tmp_path / name, name)
    written(tmp_path / ".gitignore", "venv/\n")
    monkeypatch.chdir(tmp_path)
    for pattern, names in GLOBS:
        for value in (Path(pattern), tmp_path / pattern, Paths([pattern])):
            assert list(value_of(value)) == names


def test_file_named_like_a_glob_is_read(tmp_path: Path) -> None:
    assert value_of(written(tmp_path / "[draft]*.txt", "here")) == "here"


def test_names_displayed_alike_hide_no_file(tmp_path: Path) -> None:
    """Names that are not UTF-8 are shown with escapes."""
    names = (b"x\xff", b"x\\xff", b"d\xff/a", b"d\\xff/a", b"b", b"\xff.txt")
    for name in names:
        written(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)), repr(name))
    with store(tmp_path) as stored:
        found = loaded(stored)
        assert sorted(found.values()) == sorted(map(repr, names))
        shown = {name.replace(f"{tmp_path}/", "") for name in found}
        assert shown == {"b", "\\xff.txt", "x\\xff (1)", "x\\xff (2)", "d\\xff/a (1)", "d\\xff/a (2)"}
        assert len(found) == stored.info.parts_total


def test_unfit_files_leave_no_bytes_behind(tmp_path: Path) -> None:
    start = "start \xe9\u20ac " * 100_000
    expected = {}
    for number, text in enumerate(("one", "\u017c two" * 200_000, "", "three \U0001f600", "\xe9 four" * 300_000)):
        written(tmp_path / f"{number}_a", text)
        written(tmp_path / f"{number}_b", start.encode() + b"\0")
        written(tmp_path / f"{number}_c", b"a" * 600_000 + start.encode() + b"\xff")
        written(tmp_path / f"{number}_d", "\xe9".encode()[:1])
        expected[f"{number}_a"] = text
    with store(Encoded(tmp_path, errors="strict")) as stored:
        assert loaded(stored) == stored.value() == expected
        assert stored.info.skipped == {"binary": 5, "not UTF-8": 10}
        assert stored.info.parts == tuple((name, len(text)) for name, text in expected.items())
        assert (stored.info.type_name, stored.info.total_chars) == ("dict", sum(map(len, expected.values())))
        assert form_of(stored).kind == "texts"
        assert os.fstat(fd_of(stored)).st_size < 4 * MB + 3 * MB


SECRETS = [
    *(".env", ".env.local", ".env.production", "prod.env", ".envrc", ".ENV", "app/.env.test", ".env.gz", "id_rsa.xz"),
    *("server.pem", "tls.key", "id_rsa", "id_rsa.old", "id_ed25519", "store.kdbx", "cert.p12", "cert.PFX", "app.jks"),
    *(".netrc", ".pgpass", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd", "credentials", "credentials.json"),
    *("service-account.json", "service-account-prod.json", ".docker/config.json", "home/.kube/config", ".env~"),
    *("server.key.bak", "key.pem.old", ".netrc.orig", "x/credentials.save", ".server.key.swp", ".npmrc~.bak.gz"),
    *("terraform.tfstate", "infra/prod.tfstate.backup"),
]
HARMLESS = [
    *(".env.example", ".env.sample", "a/.env.template", ".env.dist", "environment.py", "env", "dotenv.md", "a~"),
    *("id_rsa.pub", "id_ed25519.pub", ".env.example~", "id_rsa.pub.bak", "tfstate.md", "key.py", "keys", "pem.txt"),
    *("config.json", "kube/config", "credentials.py"),
]


def test_name_of_a_secret_is_known() -> None:
    assert [name for name in (*SECRETS, *HARMLESS) if is_secret(name.split("/"))] == SECRETS


def test_secrets_below_a_folder_are_left_out_unless_named(tmp_path: Path) -> None:
    below = (".ssh/known_hosts", ".aws/config", "a/.config/gcloud/x/y.json", "a/.config/z.ini")
    for name in (*SECRETS, *HARMLESS, *below):
        written(tmp_path / name, name)
    (tmp_path / "link").symlink_to(".env")
    (tmp_path / "into").symlink_to(".ssh/known_hosts")
    with store(tmp_path) as stored:
        assert set(loaded(stored)) == {*HARMLESS, "a/.config/z.ini"}
        assert stored.info.skipped == {SECRET: len(SECRETS) + 3 + 2}
        said = f"left out: {len(SECRETS) + 5} (likely a secret: name the file itself to include it)"
        assert stored.info.remarks() == [said]
    assert value_of(Paths([tmp_path / ".env", tmp_path / "keys"])) == {".env": ".env", "keys": "keys"}
    assert value_of(tmp_path / "tls.key") == "tls.key"
    refused(tmp_path / "*.pem", r"\*\.pem matches no file.*name the file itself")


def test_secrets_in_an_archive_are_left_out(tmp_path: Path) -> None:
    """Archives of Windows have backslashes in their names."""
    names = [
        "app/.env",
        "home/.ssh/config",
        "proj\\.ssh\\config",
        "home\\.aws\\credentials",
        "keys\\id_rsa",
        "src\\main.py",
    ]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive, tarfile.open(tmp_path / "a.tar", "w") as tar:
        archive.writestr("src\\", "")
        for name in names:
            archive.writestr(name, "")
            tar.addfile(tarfile.TarInfo(name))
    assert found_in(tmp_path / "a.zip") == ({"src/main.py": ""}, {SECRET: 5})
    assert found_in(tmp_path / "a.tar") == ({"src\\main.py": ""}, {SECRET: 5})
