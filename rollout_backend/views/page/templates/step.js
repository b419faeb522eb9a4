// The list, the viewer and the clicks of a step's page. All text is set as text, never as markup.
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent), grid = JSON.parse(byId("grid").textContent);
  const place = new Map(data.id.map((id, i) => [id, i]));
  const make = (name, css, text) => {
    const node = document.createElement(name);
    if (css) node.className = css;
    if (text !== undefined && text !== null) node.textContent = text;
    return node;
  };
  const shown = (value) => value === null || value === undefined ? "–" : typeof value === "number" ? (Math.abs(value) < 1000 ? +value.toPrecision(4) : Math.round(value)) + "" : value;
  const count = (value, noun) => `${shown(value)} ${noun}${value === 1 ? "" : "s"}`;
  const reward = (i) => data.reward[i] === null ? "missing" : shown(data.reward[i]);
  const outcome = (i) => data.outcomes[data.outcome[i]];
  const reason = (i) => data.reasons[data.reason[i]];
  const task = (i) => data.tasks[data.task[i]];
  const talk = (i) => data.talks[data.id[i]];
  const brief = (i) => `${data.id[i]}: ${outcome(i)}${reason(i) ? ", " + reason(i) : ""}, reward ${reward(i)}, ${shown(data.seconds[i])} s, ${shown(data.tokens[i])} tokens`;

  // --- the viewer
  let current = -1;
  const link = (i) => "#r=" + encodeURIComponent(data.id[i]);
  const open = (i) => { if (location.hash === link(i)) show(i, true); else location.hash = link(i); };

  function show(i, move) {
    current = i;
    const title = byId("viewer-title"), body = byId("viewer-body");
    title.textContent = data.id[i] + " ";
    const tag = make("span", "tag " + outcome(i), outcome(i) + (reason(i) ? " · " + reason(i) : ""));
    title.append(tag);
    const parts = [`reward ${reward(i)}`, `${shown(data.seconds[i])} s`, count(data.turns[i], "model call"), count(data.tokens[i], "sampled token"), count(data.segments[i], "row"), count(data.attempts[i], "attempt")];
    if (data.trained[i] !== null) parts.push(data.trained[i] ? "can be trained" : "cannot be trained");
    body.replaceChildren(make("p", "sub", `task ${task(i)} · ${parts.join(" · ")}`));
    const tools = make("p", "tools");
    for (const [name, step] of [["← previous in group", -1], ["next in group →", 1]]) {
      const button = make("button", "", name);
      button.type = "button";
      button.addEventListener("click", () => along(step));
      tools.append(button);
    }
    tools.append(make("code", "", `rollout show ${data.id[i]} --run ${data.runDir}`));
    body.append(tools);
    const phases = data.phases.map((name, at) => [name, data.spent[i][at]]).filter(([, seconds]) => seconds > 0);
    if (phases.length) body.append(make("p", "note", "Time: " + phases.map(([name, seconds]) => `${name} ${seconds} s`).join(", ")));
    const [log, sessions] = data.logs[data.id[i]] ?? ["", ""];
    if (sessions) body.append(make("p", "note", `Sessions: ${sessions}${log ? " · log: " + log : ""}`));
    const message = data.messages[data.message[i]];
    if (message) body.append(make("pre", "", message));
    if (reason(i) && data.advice[reason(i)]) {
      const advice = make("p", "", `What to do: ${data.advice[reason(i)].replaceAll("`", "")}; see `);
      advice.append(make("code", "", data.documented[reason(i)]));
      body.append(advice);
    }
    const found = talk(i);
    if (!found) body.append(make("p", "note", data.turns[i] === null ? "No result arrived, so there is no conversation." : "This file does not hold its conversation; the command above prints it."));
    else conversation(body, found);
    if (data.reward[i] !== null && found) body.append(block("reward", `reward ${reward(i)}`, found.extras));
    mark(i);
    for (const row of document.querySelectorAll("#table tbody tr")) row.classList.toggle("here", row.dataset.i === String(i));
    if (move) { byId("viewer").scrollIntoView(); byId("viewer").focus({ preventScroll: true }); }
  }

  function block(css, who, text, facts) {
    const node = make("div", "m " + css), head = make("div", "who");
    head.append(make("b", "", who));
    if (facts) head.append(make("span", "", facts));
    node.append(head);
    if (text) node.append(make("span", "", text));
    return node;
  }

  function conversation(body, found) {
    found.parts.forEach((part, number) => {
      if (found.parts.length > 1) body.append(make("h3", "", `Row ${number} · ${part.why}${part.tokens === null ? "" : ` · ${part.tokens} tokens`}`));
      for (const item of part.items) {
        const turn = item.turn;
        const css = ["assistant", "tool", "report"].includes(item.role) ? item.role : "other";
        if (!turn) {
          const node = block(css, item.role, item.text);
          for (const call of item.calls ?? []) node.append("\n", make("code", "", call));
          body.append(node);
          continue;
        }
        const facts = `${turn.count} tokens · ${turn.seconds} s · weights ${turn.weights || "unknown"} · cache ${turn.cached ?? "unknown"} of ${turn.prompt} · ended by ${turn.finish}`;
        const node = block(css, `${item.role} · turn ${turn.number}`, turn.tokens ? "" : item.text, facts);
        if (turn.tokens) turn.tokens.forEach((text, at) => node.append(token(text, turn.percent[at])));
        else for (const call of item.calls ?? []) node.append("\n", make("code", "", call));
        if (turn.tokens && turn.tokens.length < turn.count) node.append(make("i", "", ` … ${turn.count - turn.tokens.length} tokens more: rollout show`));
        body.append(node);
      }
    });
    if (found.traceback) { const pre = make("pre", "", found.traceback); pre.tabIndex = 0; body.append(pre); }
  }

  function token(text, percent) {
    const level = percent < 0 ? "" : percent < 5 ? " p0" : percent < 20 ? " p1" : percent < 50 ? " p2" : "";
    const node = make("span", "t" + level, text);
    node.title = percent < 0 ? "probability unknown" : percent < 1 ? "under 1 %" : `${percent} %`;
    return node;
  }

  const group = (i) => data.id.map((_, j) => j).filter((j) => data.task[j] === data.task[i]);
  function along(step) {
    if (current < 0) return;
    const members = group(current);
    open(members[(members.indexOf(current) + step + members.length) % members.length]);
  }
  byId("viewer").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { event.preventDefault(); along(step); }
  });

  // --- the heatmap
  const map = byId("heatmap"), cell = map.querySelector(".sel"), at = new Map();
  grid.cells.forEach((rows, column) => rows.forEach((i, row) => at.set(i, [column, row])));
  function mark(i) {
    const found = at.get(i);
    if (!found) return;
    const [column, row] = found;
    cell.setAttribute("x", column % grid.perBand * grid.pitch);
    cell.setAttribute("y", Math.floor(column / grid.perBand) * grid.band + row * grid.pitch);
    cell.setAttribute("visibility", "visible");
    byId("heatmap-readout").textContent = brief(i);
  }
  const point = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  function under(event) {
    const spot = point(map.querySelector("svg"), event);
    const band = Math.floor(spot.y / grid.band), column = band * grid.perBand + Math.floor(spot.x / grid.pitch);
    return grid.cells[column]?.[Math.floor((spot.y - band * grid.band) / grid.pitch)];
  }
  map.addEventListener("mousemove", (event) => { const i = under(event); if (i !== undefined) byId("heatmap-readout").textContent = brief(i); });
  map.addEventListener("click", (event) => { const i = under(event); if (i !== undefined) open(i); });
  let cursor = [0, 0];
  map.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Enter") { open(grid.cells[cursor[0]][cursor[1]]); return; }
    if (!move) return;
    event.preventDefault();
    const column = Math.min(grid.cells.length - 1, Math.max(0, cursor[0] + move[0]));
    cursor = [column, Math.min(grid.cells[column].length - 1, Math.max(0, cursor[1] + move[1]))];
    mark(grid.cells[cursor[0]][cursor[1]]);
  });

  // --- the timeline
  const times = byId("timeline"), line = times.querySelector(".cursor");
  const lineUnder = (event) => Math.floor(point(times.querySelector("svg"), event).y / grid.linePitch);
  times.addEventListener("mousemove", (event) => {
    const i = grid.lines[lineUnder(event)];
    if (i === undefined) return;
    const y = (lineUnder(event) + 0.5) * grid.linePitch;
    line.setAttribute("y1", y); line.setAttribute("y2", y); line.setAttribute("visibility", "visible");
    byId("timeline-readout").textContent = brief(i);
  });
  times.addEventListener("click", (event) => { const i = grid.lines[lineUnder(event)]; if (i !== undefined) open(i); });

  // --- the list
  const columns = [["rollout", (i) => data.id[i]], ["outcome", outcome], ["reason", reason], ["reward", (i) => data.reward[i], 1], ["seconds", (i) => data.seconds[i], 1], ["tokens", (i) => data.tokens[i], 1], ["model calls", (i) => data.turns[i], 1], ["attempts", (i) => data.attempts[i], 1], ["message", (i) => data.messages[data.message[i]]]];
  let sorted = [-1, 1], limit = 100;
  const heads = byId("table").querySelector("thead tr");
  columns.forEach(([name, , numeric], column) => {
    const head = make("th", numeric ? "n" : ""), button = make("button", "", name);
    head.scope = "col"; button.type = "button";
    button.addEventListener("click", () => { sorted = [column, sorted[0] === column ? -sorted[1] : 1]; list(); });
    head.append(button); heads.append(head);
  });
  const text = data.id.map((id, i) => `${id} ${task(i)} ${outcome(i)} ${reason(i)} ${data.messages[data.message[i]]}`.toLowerCase());
  const low = Math.min(0, ...data.reward.filter((each) => each !== null).slice(0, 1)), known = data.reward.filter((each) => each !== null);
  const least = known.reduce((a, b) => Math.min(a, b), low), most = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const fits = { "": () => true, missing: (value) => value === null, low: (value) => value !== null && value <= least, high: (value) => value !== null && value >= most };
  function list() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean), wanted = byId("outcome").value;
    const rewards = fits[byId("reward").value], readable = byId("readable").checked;
    const found = text.map((_, i) => i).filter((i) => words.every((word) => text[i].includes(word)) && (wanted === "" || data.outcome[i] === +wanted) && rewards(data.reward[i]) && (!readable || talk(i)));
    const [column, way] = sorted;
    if (column >= 0) {
      const value = columns[column][1];
      found.sort((a, b) => {
        const x = value(a), y = value(b);
        if (x === null || y === null) return (x === null) - (y === null);
        return way * (typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true }));
      });
    }
    [...heads.children].forEach((head, i) => { if (i === column) head.ariaSort = way > 0 ? "ascending" : "descending"; else head.removeAttribute("aria-sort"); });
    byId("found").textContent = `${found.length.toLocaleString("en")} of ${data.id.length.toLocaleString("en")}`;
    byId("more").hidden = found.length <= limit;
    byId("table").querySelector("tbody").replaceChildren(...found.slice(0, limit).map((i) => {
      const row = make("tr", i === current ? "here" : "");
      row.dataset.i = i;
      columns.forEach(([name, value, numeric], number) => {
        const field = make("td", numeric ? "n" : name === "message" ? "text" : "id");
        if (number === 0) { const to = make("a", "", data.id[i]); to.href = link(i); field.append(to); }
        else if (name === "outcome") field.append(make("span", "tag " + outcome(i), outcome(i)));
        else field.textContent = name === "reward" ? reward(i) : name === "message" ? value(i).slice(0, 160) : shown(value(i));
        row.append(field);
      });
      return row;
    }));
  }
  for (const id of ["search", "outcome", "reward", "readable"]) byId(id).addEventListener("input", () => { limit = 100; list(); });
  byId("more").addEventListener("click", () => { limit += 100; list(); });
  for (const button of document.querySelectorAll("[data-filter]")) button.addEventListener("click", () => {
    byId("search").value = button.dataset.filter; limit = 100; list(); byId("rollouts").scrollIntoView();
  });

  // --- links
  function follow() {
    if (!location.hash.startsWith("#r=")) return;
    const i = place.get(decodeURIComponent(location.hash.slice(3)));
    if (i !== undefined) show(i, true);
  }
  addEventListener("hashchange", follow);
  list();
  if (location.hash.startsWith("#r=")) follow();
  else {
    const first = data.id.findIndex((_, i) => talk(i) && data.outcome[i] !== 0);
    const any = first >= 0 ? first : data.id.findIndex((_, i) => talk(i));
    if (any >= 0) show(any, false);
  }
})();
