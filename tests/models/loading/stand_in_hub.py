"""A hub of models in a process of its own: `python stand_in_hub.py FOLDER LOG`.

It serves `FOLDER/owner/name` over HTTP as hubs do, prints its address, and writes what
it was asked for into LOG, a line a request. It imports the standard library alone.
"""

import functools
import hashlib
import http.server
import json
import pathlib
import sys
import urllib.parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def digest(file):
  return hashlib.sha256(file.read_bytes()).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
  """Answers for the files below `root`."""

  def __init__(self, root, log, *arguments):
    self.root, self.log = root, log
    super().__init__(*arguments)

  def log_message(self, *_):
    pass

  def answer(self, status, body=b"", **headers):
    self.send_response(status)
    for name, value in {"Content-Length": len(body), **headers}.items():
      self.send_header(name.replace("_", "-"), str(value))
    self.end_headers()
    if self.command == "GET":
      self.wfile.write(body)

  def do_GET(self):
    path = urllib.parse.unquote(self.path.split("?")[0])
    with self.log.open("a") as file:
      file.write(f"{self.command} {path}\n")
    match path.strip("/").split("/"):
      case [""]:
        self.answer(200)
      case ["api", "models", owner, name, *rest] if (
        folder := self.root / owner / name
      ).is_dir():
        files = sorted(one for one in folder.rglob("*") if one.is_file())
        names = [str(one.relative_to(folder)) for one in files]
        told = {"id": f"{owner}/{name}", "sha": COMMIT}
        told["siblings"] = [{"rfilename": name} for name in names]
        if rest[:1] == ["tree"]:
          told = [
            {
              "type": "file",
              "path": name,
              "size": one.stat().st_size,
              "oid": digest(one),
            }
            for name, one in zip(names, files, strict=True)
          ]
        self.answer(200, json.dumps(told).encode(), Content_Type="application/json")
      case [owner, name, "resolve", _, *inside] if (
        file := self.root.joinpath(owner, name, *inside)
      ).is_file():
        tag = f'"{digest(file)}"'
        self.answer(200, file.read_bytes(), ETag=tag, X_Repo_Commit=COMMIT)
      case ["api", *_]:
        self.answer(404, X_Error_Code="RepoNotFound")
      case _:
        self.answer(404, X_Error_Code="EntryNotFound")

  do_HEAD = do_GET


def main():
  root, log = map(pathlib.Path, sys.argv[1:])
  handler = functools.partial(Hub, root, log)
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
  print(f"http://127.0.0.1:{server.server_port}", flush=True)
  server.serve_forever()


if __name__ == "__main__":
  main()
