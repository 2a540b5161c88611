"""A stand-in for a language model at an endpoint: it answers with known edits."""

import http.server
import json
import re
import threading

from mxjax.discovery.core import identity

SEVERAL = 8
"""Requests that wait at the same time, at which `Endpoint.several` is set."""


def of_templates(templates):
  """Returns a function that answers prompts with edits of a task's templates.

  What it proposes depends on the prompt and on `seed` of the request alone, so it is
  the same whatever the order of requests is.
  """

  def answer(request):
    # What a call took is another number at every measurement.
    text = re.sub(r" Its call took .*", "", request["messages"][1]["content"])
    turn = len(request["messages"])
    listed = text.partition('Open to a question now, as "residual":\n')[2]
    names = re.findall(r"^- (\w+) = ", listed.partition("\n\n")[0], re.MULTILINE)
    draw = (identity.digest(text), request.get("seed"), turn)
    fitting = [t for t in templates if not names or t.residual in names]
    template = identity.pick(fitting or templates, *draw)
    params = template.params[min(1, len(template.params) - 1)]
    code = template.template
    for name, each in params.items():
      code = code.replace(f"{{{name}}}", repr(each))
    made = {"label": template.label(params), "code": code}
    value = lambda v: params[v[1:]] if str(v).startswith("$") else v
    made["plan"] = {key: value(v) for key, v in template.plan.items()}
    if template.residual in names:
      made |= {
        "residual": template.residual,
        "explanations": [
          {
            "name": e.name,
            "statement": e.statement,
            "predictions": {
              condition: {
                name.removesuffix(" of the edit"): s for name, s in row.items()
              }
              for condition, row in e.predictions.items()
            },
          }
          for e in template.explanations
        ],
        "controls": [
          {"name": c.name, "intervention": dict(c.intervention)}
          for c in template.controls
        ],
      }
    return json.dumps(made)

  return answer


class Endpoint:
  """Serves `answer` as an OpenAI-compatible endpoint; None refuses a request.

  `requests` holds every body.
  """

  def __init__(self, answer):
    self.requests, self.answer = [], answer
    self.most_at_once = self._now = 0
    self.several = threading.Event()
    lock, endpoint = threading.Lock(), self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
          endpoint.requests.append(body)
          endpoint._now += 1
          endpoint.most_at_once = max(endpoint.most_at_once, endpoint._now)
          if endpoint._now >= SEVERAL:
            endpoint.several.set()
        text = endpoint.answer(body)
        if text is None:
          with lock:
            endpoint._now -= 1
          return self.send_error(400)
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        reply = {"model": body["model"], "choices": [choice], "usage": usage}
        data = json.dumps(reply).encode()
        with lock:
          endpoint._now -= 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

      def log_message(self, *_):
        pass

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def close(self):
    self._server.shutdown()
    self._server.server_close()
