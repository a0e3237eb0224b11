// Browsers start no web workers on pages that are opened from disk. There, search runs in a hidden frame instead.
if (location.protocol === "file:") {
  const load = (inside, url) => new Promise((done, failed) => {
    const script = Object.assign(inside.document.createElement("script"), { src: url, onload: done, onerror: failed });
    inside.document.head.append(script);
  });
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true, title: "search" });
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) => Promise.all(urls.map((each) => load(this.inside, each)));
      this.ready = load(this.inside, url);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
